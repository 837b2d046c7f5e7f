"""Run a policy over questions, score what it answers, summarise a run, and compare two."""
