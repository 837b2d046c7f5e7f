"""Running tools: order, batches, coroutines, and everything that can go wrong."""

import asyncio
import signal
import sys
import threading
import time

import pytest

from mempo_trl.tools import ToolRunner, ToolUnavailableError, time_limit


def add(a: int, b: int = 1) -> int:
    return a + b


async def slowly(text: str) -> str:
    await asyncio.sleep(0.01)
    return text.upper()


def broken(text: str) -> str:
    raise RuntimeError(f"cannot do {text}")


TOOLS = {"add": add, "slowly": slowly, "broken": broken}


def request(name, /, **arguments):
    return {"name": name, "arguments": arguments}


def texts(results):
    return [result.text for result in results]


def test_every_request_is_answered_in_order():
    results = ToolRunner().run(
        [
            (TOOLS, request("slowly", text="x")),
            (TOOLS, request("add", a=1)),
            (TOOLS, "The tool call is not valid JSON."),
            (TOOLS, request("broken", text="it")),
            (TOOLS, request("slowly", text="y")),
            (TOOLS, request("nothing")),
            (TOOLS, request("add", c=1)),
            ({}, request("add", a=1)),
        ]
    )
    assert texts(results)[:5] == [
        "X",
        "2",
        "Error: The tool call is not valid JSON.",
        "Error: RuntimeError: cannot do it",
        "Y",
    ]
    assert "no tool named 'nothing'" in results[5].text
    assert "add, slowly, broken" in results[5].text
    assert "Error" in results[6].text
    assert "'c'" in results[6].text or "'a'" in results[6].text
    assert "none" in results[7].text
    assert [result.failed for result in results] == [False, False, True, True, False, True, True, True]
    assert [result.malformed for result in results] == [False, False, True] + [False] * 5


def test_coroutines_run_concurrently_in_a_given_loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    meeting = []

    async def meet(name: str) -> str:
        meeting.append(name)
        while len(meeting) < 3:
            await asyncio.sleep(0.001)
        return name

    runner = ToolRunner(timeout=10, event_loop=loop)
    assert texts(runner.run([({"meet": meet}, request("meet", name=n)) for n in "abc"])) == ["a", "b", "c"]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


class Batched:
    """A tool with `.batch`, counting its calls."""

    __name__ = "look"

    def __init__(self, answer=lambda batch: [f"<{a['key']}>" for a in batch]):
        self.answer = answer
        self.batches: list[list[dict]] = []

    def __call__(self, key: str) -> str:
        return self.batch([{"key": key}])[0]

    def batch(self, arguments):
        self.batches.append(arguments)
        return self.answer(arguments)


def test_a_batch_answers_all_rollouts_in_one_call():
    look = Batched()
    tools = {"look": look, "add": add}
    results = ToolRunner().run(
        [(tools, request("look", key="a")), (tools, request("add", a=1)), (tools, request("look", key="b"))]
    )
    assert texts(results) == ["<a>", "2", "<b>"]
    assert look.batches == [[{"key": "a"}, {"key": "b"}]]


def test_arguments_that_do_not_fit_stay_out_of_the_batch():
    look = Batched()
    results = ToolRunner().run([({"look": look}, request("look", wrong=1)), ({"look": look}, request("look", key="b"))])
    assert [result.failed for result in results] == [True, False]
    assert look.batches == [[{"key": "b"}]]


def test_one_bad_argument_does_not_fail_the_batch():
    def answer(batch):
        if any(not isinstance(a["key"], str) for a in batch):
            raise TypeError("key must be text")
        return [a["key"] for a in batch]

    look = Batched(answer)
    results = ToolRunner().run([({"look": look}, request("look", key=key)) for key in ("a", 3, "b")])
    assert texts(results) == ["a", "Error: TypeError: key must be text", "b"]


def test_a_batch_may_answer_with_an_error():
    look = Batched(lambda batch: ["a", ValueError("not this one")])
    results = ToolRunner().run([({"look": look}, request("look", key=key)) for key in "ab"])
    assert texts(results) == ["a", "Error: ValueError: not this one"]


def test_a_backend_that_is_down_is_asked_once():
    def answer(batch):
        raise ConnectionError("refused")

    look = Batched(answer)
    results = ToolRunner().run([({"look": look}, request("look", key=key)) for key in "abc"])
    assert texts(results) == ["Error: ConnectionError: refused"] * 3
    assert len(look.batches) == 1


def test_a_wrong_number_of_results():
    look = Batched(lambda batch: ["x"])
    results = ToolRunner().run([({"look": look}, request("look", key=key)) for key in "ab"])
    assert all(result.failed and "1 results for 2 calls" in result.text for result in results)


class Unprintable:
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "tool",
    [
        lambda: sys.exit(3),
        lambda: 1 / 0,
        Unprintable,
        lambda: (_ for _ in ()).throw(TimeoutError()),
    ],
)
def test_nothing_a_tool_does_escapes(tool):
    (result,) = ToolRunner(timeout=0.2).run([({"t": tool}, request("t"))])
    assert result.failed
    assert result.text.startswith("Error: ")


def test_the_users_interrupt_is_not_the_tools():
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ToolRunner().run([({"t": interrupt}, request("t"))])


def hang():
    time.sleep(30)


def hang_stubbornly():
    for _ in range(3):
        try:
            time.sleep(30)
        except TimeoutError:
            pass
    return "gave up waiting"


async def hang_async():
    await asyncio.sleep(30)


@pytest.mark.parametrize("tool", [hang, hang_async])
def test_a_tool_that_hangs_is_interrupted(tool):
    before = signal.getsignal(signal.SIGALRM)
    (result,) = ToolRunner(timeout=0.05).run([({"t": tool}, request("t"))])
    assert result.failed
    assert "timed out" in result.text
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_tool_that_swallows_the_interrupt_is_interrupted_again():
    (result,) = ToolRunner(timeout=0.05).run([({"t": hang_stubbornly}, request("t"))])
    assert result.text == "gave up waiting"


def test_a_batch_that_hangs_fails_every_call():
    look = Batched(lambda batch: time.sleep(30))
    results = ToolRunner(timeout=0.05).run([({"look": look}, request("look", key=key)) for key in "ab"])
    assert ["timed out" in result.text for result in results] == [True, True]


def test_a_coroutine_that_blocks_its_loop():
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    release = threading.Event()

    async def block():
        release.wait(30)

    (result,) = ToolRunner(timeout=0.05, event_loop=loop).run([({"t": block}, request("t"))])
    assert "timed out" in result.text
    release.set()
    loop.call_soon_threadsafe(loop.stop)


def test_a_timer_that_already_runs_is_kept():
    fired = []
    previous = signal.signal(signal.SIGALRM, lambda *_: fired.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with time_limit(10):
            pass
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.2
        time.sleep(0.4)
        assert fired == [1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_outside_the_main_thread_there_is_no_limit():
    results = []
    thread = threading.Thread(
        target=lambda: results.extend(ToolRunner(timeout=0.01).run([({"add": add}, request("add", a=2))]))
    )
    thread.start()
    thread.join()
    assert texts(results) == ["3"]


class Panic(BaseException):
    """What Rust extensions raise."""


class Unshowable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def raising(error):
    def tool():
        raise error

    return tool


def raising_async(error):
    async def tool():
        raise error

    return tool


@pytest.mark.parametrize("error", [Panic("at the disco"), Unshowable(), SystemExit(2), GeneratorExit()], ids=repr)
@pytest.mark.parametrize("kind", [raising, raising_async])
@pytest.mark.parametrize("threaded", [False, True])
def test_everything_that_can_be_raised(error, kind, threaded):
    loop = asyncio.new_event_loop() if threaded else None
    if loop:
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
    runner = ToolRunner(timeout=5, event_loop=loop)
    (result,) = runner.run([({"t": kind(error)}, request("t"))])
    assert result.failed
    assert result.text.startswith("Error: ")
    if loop:
        assert thread.is_alive()
        assert texts(runner.run([(TOOLS, request("slowly", text="x"))])) == ["X"]
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def test_tools_that_are_asynchronous_in_other_ways():
    class Callable:
        async def __call__(self, text: str) -> str:
            return text.upper()

    def wrapper(text: str):
        return slowly(text)

    results = ToolRunner().run([({"t": tool}, request("t", text="x")) for tool in (Callable(), wrapper)])
    assert texts(results) == ["X", "X"]


def test_arguments_that_only_the_call_refuses():
    """`self` fits the signature's keywords and not the method."""

    class Environment:
        async def look(self, query: str, **options: str) -> str:
            return query

    (result,) = ToolRunner().run([({"look": Environment().look}, request("look", query="x", **{"self": "1"}))])
    assert result.failed
    assert "self" in result.text


def test_a_tool_that_cancels_its_loop():
    async def cancel():
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(1)

    (result,) = ToolRunner(timeout=5).run([({"t": cancel}, request("t"))])
    assert result.failed


def test_the_limit_never_outlives_the_call():
    """A tool that ends just when its time is up."""

    def spin():
        end = time.perf_counter() + 0.0005
        while time.perf_counter() < end:
            pass

    runner = ToolRunner(timeout=0.0005)
    before = signal.getsignal(signal.SIGALRM)
    for _ in range(1500):
        runner.run([({"t": spin}, request("t"))])
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        assert signal.getsignal(signal.SIGALRM) is before


def test_text_can_always_be_encoded():
    results = ToolRunner().run([({"t": lambda: "a\ud83db"}, request("t")), ({}, request("\ud83d")), ({}, "\ud83d")])
    for result in results:
        result.text.encode("utf-8")
    assert results[0].text == "a?b"
    assert [result.name for result in results] == ["t", "unknown", "unknown"]


# --- Tools whose service is down --------------------------------------------------------------------------------------


def look(key: str, fails: str = "no") -> str:
    errors = {
        "down": ToolUnavailableError("The server http://10.0.0.7 does not answer"),
        "refused": ConnectionRefusedError("refused"),
        "late": TimeoutError(),
        "broken": RuntimeError("broken"),
    }
    if fails in errors:
        raise errors[fails]
    return key


def test_turns_without_a_tool_are_counted(caplog):
    runner = ToolRunner()
    tools = {"look": look, "add": add}

    def turn(*requests):
        return runner.run([(tools, r) for r in requests])

    down, late = request("look", key="a", fails="down"), request("look", key="a", fails="late")
    results = turn(down, late, request("add", a=1), request("look", wrong=1), "malformed")
    assert [r.unavailable is not None for r in results] == [True, True, False, False, False]
    assert results[0].text == "Error: look is not available at the moment."  # the model reads no address
    assert runner.unavailable["look"][0] == 1
    turn(request("add", a=1))  # was not asked for
    turn(request("look", wrong=1), request("look", key="a", fails="broken"))  # tells nothing
    assert runner.unavailable["look"][0] == 1
    turn(down, request("look", wrong=1))
    assert runner.unavailable["look"] == (2, "The server http://10.0.0.7 does not answer")
    turn(request("look", key="a", fails="refused"))
    assert runner.unavailable["look"] == (3, "refused")
    turn(down, request("look", key="a"))  # one call is answered
    assert runner.unavailable == {}
    assert "The tool look is available again." in caplog.text
    turn(down)
    assert runner.unavailable["look"][0] == 1


def test_a_batch_whose_service_is_down_is_asked_once():
    asked = []

    def search(arguments):
        asked.append(len(arguments))
        raise ToolUnavailableError("down")

    runner, tools = ToolRunner(), {"look": Batched(search)}
    results = runner.run([(tools, request("look", key=key)) for key in "abc"])
    assert asked == [3]
    assert [r.unavailable for r in results] == ["down"] * 3
    assert runner.unavailable == {"look": (1, "down")}


def test_an_asynchronous_tool_where_a_loop_runs_already():
    """In a notebook, or in an asynchronous server."""

    async def ask():
        return ToolRunner().run([({"slowly": slowly}, {"name": "slowly", "arguments": {"text": "a"}})])

    [result] = asyncio.run(ask())
    assert (result.failed, result.text) == (False, asyncio.run(slowly("a")))
