"""With a vLLM server, which answers all processes in one request, each process gets its own completions."""

import json
import re
from pathlib import Path

import pytest
from launch import PLAIN, launch
from vllm_stand_in import MAX_MODEL_LEN, logprob, serve


WORKER = Path(__file__).with_name("vllm_server_worker.py")
PROCESSES, ROWS = 2, 4
NO_ROOM = " and so on" * 200
LITTLE_ROOM = " and so on" * 150  # less than a turn may have


def run(out: Path, num_generations: int, questions: list[str]):
    """Train on four rollouts a process; what the processes wrote, and what the server was asked."""
    with serve() as (stand_in, url):
        launch(PLAIN, WORKER, out, url, num_generations, *questions)
    return [json.loads((out / f"{process}.json").read_text()) for process in range(PROCESSES)], stand_in


@pytest.mark.parametrize(
    ("num_generations", "questions", "turns", "requests"),
    [
        pytest.param(
            2,
            [
                # Two questions a process and step. One process answers at once, the other runs on.
                *("q0 plan 1", "q1 plan 1", "q2 plan 9", "q3 plan 29"),
                *("q4 plan 13", "q5 plan 2", "q6 plan 3" + NO_ROOM, "q7 plan 3" + NO_ROOM),
                *("q8 plan 9" + NO_ROOM, "q9 plan 2", "q10 plan 9", "q11 plan 2" + LITTLE_ROOM),
            ],
            [
                [[1, 1, 1, 1], [4, 4, 2, 4]],
                [[1, 3, 2, 2], [0, 0, 0, 0]],
                [[0, 0, 2, 2], [4, 4, 2, 2]],
            ],
            [
                [(4, 2), (8, 1), (6, 1), (6, 1)],
                [(8, 1), (6, 1), (2, 1)],
                [(6, 1), (2, 1), (6, 1), (2, 1), (4, 1), (4, 1)],
            ],
            id="several questions a process",
        ),
        pytest.param(
            8,
            ["q0 plan 11112999", "q1 plan 92311111"],
            [[[1, 1, 1, 1], [2, 4, 4, 4]], [[4, 2, 3, 1], [1, 1, 1, 1]]],
            [[(1, 8), (8, 1), (6, 1), (6, 1)], [(1, 8), (6, 1), (4, 1), (2, 1)]],
            id="a question over both processes",
        ),
    ],
)
def test_each_process_gets_its_own_completions(tmp_path, num_generations, questions, turns, requests):
    processes, stand_in = run(tmp_path, num_generations, questions)
    numbers = []
    for step in range(len(turns)):
        for process in range(PROCESSES):
            rows = processes[process]["rollouts"][step]
            assert [len(row["turns"]) for row in rows] == turns[step][process]
            for index, row in enumerate(rows):
                # The dataset's order, so that the process's own questions are known.
                place = (step * PROCESSES + process) * ROWS + index
                assert row["question"] == questions[place // num_generations][:40]
                if not row["turns"]:
                    assert row["stop"] == "max_context_length"
                    continue
                written = [re.search(r"rollout (\d+), turn (\d+), saw (\d+)", turn) for turn in row["turns"]]
                (number,) = {int(match[1]) for match in written}
                numbers.append(number)
                assert [int(match[2]) for match in written] == list(range(1, len(written) + 1))
                assert [int(match[3]) for match in written] == row["saw"]
                assert row["logprobs"] == [[logprob(i) for i in ids] for ids in row["ids"]]
    # Rollouts are numbered in the order of the prompts, and no completion is given to two rows.
    assert numbers == sorted(set(numbers))

    asked = iter(stand_in.requests)
    for sizes in requests:
        for size, n in sizes:
            request = next(asked)
            assert (len(request["prompt"]), request["n"]) == (size, n)
            assert size * n % PROCESSES == 0
            assert max(map(len, request["prompt"])) + request["max_tokens"] <= MAX_MODEL_LEN
    assert next(asked, None) is None
    # Weights are sent once a step, before its first turn, and what was cached for the old ones is dropped.
    (first, *later) = [paths.split() for paths in " ".join(stand_in.paths).split("/update_weights")[1:]]
    for paths, sizes in zip([first, *later], requests, strict=True):
        assert paths == ["/reset_prefix_cache", *["/v1/completions"] * len(sizes)]
    assert processes[0]["weights"] == processes[1]["weights"]
