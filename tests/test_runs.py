import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mempo_trl.engines import AgentSettings, EndpointError, Episode, Sampling, Step
from mempo_trl.run_folder import RunFolder, read_trajectories
from mempo_trl.runs import check_questions, run_questions


TESTS = Path(__file__).parent
QUESTIONS = check_questions([{"question": f"q{n}", "answers": [[f"a{n}"]], "id": f"id{n}"} for n in range(5)])


class Answers:
    """An engine that answers at once, in an odd order, and counts what it is asked."""

    identity, tools = "answers", ()

    def __init__(self):
        self.settings, self.sampling, self.asked = AgentSettings(), Sampling(), []

    def rollout(self, prompts, seeds):
        for position in reversed(range(len(prompts))):
            self.asked.append((prompts[position][-1]["content"], seeds[position]))
            text = f"<think>t</think><answer>{prompts[position][-1]['content']}</answer>"
            yield position, Episode([Step(text, 3, 2)], "answer")


def test_records_are_in_the_order_of_the_questions(tmp_path):
    engine = Answers()
    with RunFolder(tmp_path / "run", {"model": "m"}) as folder:
        with pytest.warns(UserWarning, match="All samples of a question will be the same"):
            records = run_questions(engine, QUESTIONS, folder, samples=2, progress=False)
    assert [(record["id"], record["sample"]) for record in records] == [(f"id{n}", s) for n in range(5) for s in (0, 1)]
    assert records[3] == {
        "id": "id1",
        "sample": 1,
        "question": "q1",
        "answers": [["a1"]],
        "prediction": "q1",
        "steps": [
            {
                "text": "<think>t</think><answer>q1</answer>",
                "prompt_tokens": 3,
                "completion_tokens": 2,
                "observation": [],
            }
        ],
        "stop_reason": "answer",
        "error": None,
        "tool_calls": 0,
        "tool_failures": 0,
        "unavailable_calls": 0,
        "malformed_calls": 0,
    }
    assert len({seed for _, seed in engine.asked}) == 10
    key = lambda record: (record["id"], record["sample"])  # noqa: E731
    assert sorted(read_trajectories(tmp_path / "run"), key=key) == sorted(records, key=key)


def test_a_run_goes_on_where_it_was(tmp_path):
    about = {"model": "m", "seed": 0}
    with RunFolder(tmp_path / "run", about) as folder:
        first = run_questions(Answers(), QUESTIONS[:2], folder, progress=False)
    file = tmp_path / "run" / "trajectories.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + whole[: len(whole) // 3])  # killed in the middle of a line
    engine = Answers()
    engine.sampling = Sampling(temperature=1.0)
    with RunFolder(tmp_path / "run", about) as folder:
        records = run_questions(engine, QUESTIONS[:3], folder, samples=2, progress=False)
    assert len(engine.asked) == 4
    assert [records[0], records[2]] == first
    assert file.read_bytes().startswith(whole)
    assert len(list(read_trajectories(tmp_path / "run"))) == 6

    # What a question draws does not depend on what was run before it.
    alone = Answers()
    with pytest.warns(UserWarning):
        run_questions(alone, QUESTIONS[:3], samples=2, progress=False)
    assert set(engine.asked) < set(alone.asked)

    again = Answers()
    with RunFolder(tmp_path / "run", about, overwrite=True) as folder:
        run_questions(again, QUESTIONS[:1], folder, progress=False)
    assert len(again.asked) == len(list(read_trajectories(tmp_path / "run"))) == 1


def test_a_run_of_something_else_is_refused(tmp_path):
    with RunFolder(tmp_path / "run", {"model": "m"}) as folder:
        run_questions(Answers(), QUESTIONS[:1], folder, progress=False)
    with pytest.raises(ValueError, match=r"begun with another model \(\"m\", now \"n\"\)"):
        RunFolder(tmp_path / "run", {"model": "n"})
    with pytest.raises(ValueError, match=r"begun with another seed \(null, now 1\)"):
        RunFolder(tmp_path / "run", {"model": "m", "seed": 1})
    other = [{**QUESTIONS[0], "answers": [["b"]]}]
    with RunFolder(tmp_path / "run", {"model": "m"}) as folder:
        with pytest.raises(ValueError, match="The question 'id0' is another one"):
            run_questions(Answers(), other, folder, progress=False)


def test_one_process_writes_at_a_time(tmp_path):
    with RunFolder(tmp_path / "run", {}):
        code = f"from mempo_trl.run_folder import RunFolder; RunFolder({str(tmp_path / 'run')!r}, {{}})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "Another process writes to" in done.stderr
    with RunFolder(tmp_path / "run", {}):
        pass


def test_what_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "trajectories.jsonl").write_text("mine\n")
    with pytest.raises(FileExistsError, match=r"exists, but not run.json"):
        RunFolder(tmp_path, {})
    assert (tmp_path / "trajectories.jsonl").read_text() == "mine\n"
    with pytest.raises(FileExistsError, match="is a file: name a folder"):
        RunFolder(tmp_path / "trajectories.jsonl", {})
    with pytest.raises(FileNotFoundError, match="name the folder of a run"):
        list(read_trajectories(tmp_path / "nothing"))


def test_a_damaged_line_is_named(tmp_path):
    with RunFolder(tmp_path, {}) as folder:
        run_questions(Answers(), QUESTIONS[:3], folder, progress=False)
    lines = (tmp_path / "trajectories.jsonl").read_text().splitlines()
    (tmp_path / "trajectories.jsonl").write_text("\n".join([lines[0], lines[1][:20], lines[2], ""]))
    with pytest.raises(ValueError, match=r"Line 2 of .*trajectories.jsonl is damaged"):
        RunFolder(tmp_path, {})


def test_text_that_cannot_be_encoded_is_kept_readable(tmp_path):
    with RunFolder(tmp_path, {}) as folder:
        folder.append({"id": "\ud800", "sample": 0, "steps": [], "text": "中文"})
    assert list(read_trajectories(tmp_path)) == [{"id": "?", "sample": 0, "steps": [], "text": "中文"}]


@pytest.mark.parametrize("kills", [4])
def test_killed_runs_end_with_every_episode_once(tmp_path, kills):
    """A process is killed again and again; the last one finishes the work."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        textwrap.dedent(f"""
        import sys, time
        sys.path.insert(0, {str(TESTS)!r})
        from test_runs import Answers, QUESTIONS
        from mempo_trl.run_folder import RunFolder
        from mempo_trl.runs import check_questions, run_questions

        class Slow(Answers):
            def rollout(self, prompts, seeds):
                for found in super().rollout(prompts, seeds):
                    time.sleep(0.02)
                    yield found

        questions = check_questions([{{"question": f"q{{n}}", "answers": ["a"]}} for n in range(150)])
        with RunFolder({str(tmp_path / "run")!r}, {{}}) as folder:
            run_questions(Slow(), questions, folder, progress=False)
    """)
    )
    command = [sys.executable, str(worker)]
    file = tmp_path / "run" / "trajectories.jsonl"
    for number in range(kills):
        process = subprocess.Popen(command)
        size, deadline = (file.stat().st_size if file.exists() else 0), time.monotonic() + 120
        while (not file.exists() or file.stat().st_size < size + 2000 * (number + 1)) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run(command, check=True)
    ids = [json.loads(line)["id"] for line in file.read_text().splitlines()]
    assert sorted(ids, key=int) == [str(n) for n in range(150)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "There are no questions"),
        ([{"answers": ["a"]}], "Row 0 has no text in `question`"),
        ([{"question": " "}], "Row 0 has no text in `question`"),
        ([{"question": "q", "answers": []}], "The column `answers` is empty in row 0"),
        ([{"question": "q", "id": 1}, {"question": "r", "id": "1"}], "Two rows have the id '1'"),
        (["q"], "Row 0 is no dictionary"),
        ([{"prompt": []}], "Row 0 has no conversation in `prompt`"),
        ([{"prompt": ["q"]}], "Row 0 has no conversation in `prompt`"),
        ([{"prompt": [{"content": "q"}]}], "Row 0 has no conversation in `prompt`"),
        ([{"prompt": [{"role": "user", "content": "q", "picture": b"1"}]}], "Row 0 holds what JSON cannot"),
    ],
)
def test_rows_that_are_no_questions(rows, message):
    with pytest.raises(ValueError, match=message):
        check_questions(rows)


def test_rows_of_both_shapes():
    conversation = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert check_questions([{"prompt": conversation, "answers": ["a", "b"]}, {"question": "r"}]) == [
        {"id": "0", "question": "q", "prompt": conversation, "answers": [["a", "b"]]},
        {"id": "1", "question": "r", "prompt": None, "answers": None},
    ]


def test_ids_that_are_missing_and_text_that_cannot_be_encoded(tmp_path):
    rows = [{"question": "a\ud800", "id": None, "answers": ["\udfff"]}, {"question": "b", "id": None, "answers": ["b"]}]
    questions = check_questions(rows)
    assert [(row["id"], row["question"], row["answers"]) for row in questions] == [
        ("0", "a?", [["?"]]),
        ("1", "b", [["b"]]),
    ]
    for _ in range(2):
        with RunFolder(tmp_path, {}) as folder:
            assert len(run_questions(Answers(), check_questions(rows), folder, progress=False)) == 2


class Refuses(Answers):
    """Like an endpoint that refuses all questions but these."""

    def __init__(self, *answered):
        super().__init__()
        self.answered = answered

    def rollout(self, prompts, seeds):
        for position, episode in super().rollout(prompts, seeds):
            refused = prompts[position][-1]["content"] not in self.answered
            yield position, Episode([], "refused", error="no such option") if refused else episode


def test_refusals_of_everything_are_no_results(tmp_path):
    with RunFolder(tmp_path, {}) as folder:
        with pytest.raises(EndpointError, match="refuses every request: no such option"):
            run_questions(Refuses(), QUESTIONS, folder, progress=False)
    assert not list(read_trajectories(tmp_path))
    with RunFolder(tmp_path, {}) as folder:
        records = run_questions(Refuses("q1"), QUESTIONS[:3], folder, progress=False)
    assert [record["error"] for record in records] == ["no such option", None, "no such option"]
    assert len(list(read_trajectories(tmp_path))) == 3
    # A run that has results is not lost for one question that is always refused.
    with RunFolder(tmp_path, {}) as folder:
        assert run_questions(Refuses(), QUESTIONS[:4], folder, progress=False)[3]["stop_reason"] == "refused"


def test_an_episode_that_could_not_be_read_again_is_not_written(tmp_path):
    class Odd(Answers):
        def rollout(self, prompts, seeds):
            yield 0, Episode([Step("t", 1.5, 2)], "answer")

    with RunFolder(tmp_path, {}) as folder:
        with pytest.raises(ValueError, match="prompt_tokens"):
            run_questions(Odd(), QUESTIONS[:1], folder, progress=False)
    assert not list(read_trajectories(tmp_path))


def test_what_was_made_of_a_run_goes_with_it(tmp_path):
    made = ["sft.jsonl", "sft_no_memory.jsonl", "summary.json", "summary.md"]
    for name in [*made, "notes.txt"]:
        (tmp_path / name).write_text("old")
    with RunFolder(tmp_path, {}, overwrite=True):
        pass
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == [
        "notes.txt",
        "run.json",
        "trajectories.jsonl",
    ]


def test_a_disk_without_room_is_named(tmp_path):
    code = """
        import resource, signal, sys
        from mempo_trl.run_folder import RunFolder
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with RunFolder(sys.argv[1], {}) as folder:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
            for number in range(100):
                folder.append({"id": str(number), "sample": 0, "steps": [], "text": "x" * 100})
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"{str(tmp_path / 'trajectories.jsonl')!r}" in done.stderr.splitlines()[-1]
    with RunFolder(tmp_path, {}) as folder:
        assert [record["id"] for record in folder.records] == [str(n) for n in range(len(folder.records))]
        assert len(folder.records) > 20


@pytest.mark.parametrize("samples", [0, 1.5, True])
def test_a_wrong_number_of_samples(samples):
    with pytest.raises(ValueError, match="`samples="):
        run_questions(Answers(), QUESTIONS, samples=samples)
