"""Long phases show a bar on a terminal and lines elsewhere; short phases and quiet commands show nothing."""

import io
import re
import time

import pytest
import transformers
from rich.console import Console as RichConsole

from finetune.core import progress
from finetune.core.console import Console, quieten_libraries


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of the monotonic clock; a test sets them."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def shown(console: Console, clock: list[float], total: int | None, seconds: float) -> None:
    with progress.phase(console, "scoring"):
        for _ in progress.track([[1, 2]] * 50, total):
            clock[0] += seconds


def test_without_a_terminal_a_line_every_30_seconds(clock, capsys) -> None:
    shown(Console(), clock, 100, 2.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "scoring: 30 of 100, 1 min 10 s left",
        "scoring: 60 of 100, 40 s left",
        "scoring: 90 of 100, 10 s left",
    ]
    shown(Console(), clock, None, 2.0)
    assert capsys.readouterr().out.splitlines()[0] == "scoring: 30 done"


@pytest.mark.parametrize("seconds", [0.01, 0.5])
def test_short_phases_print_no_line(seconds, clock, capsys) -> None:
    shown(Console(), clock, 100, seconds)
    shown(Console(quiet=True), clock, 100, 60.0)
    assert list(progress.track([[1]], 1)) == [[1]]
    assert capsys.readouterr().out == ""


def test_terminal_has_a_bar_with_the_time_left(clock) -> None:
    console, text = Console(), io.StringIO()
    console.console = RichConsole(file=text, force_terminal=True, width=80)
    shown(console, clock, 100, 2.0)
    assert "scoring" in text.getvalue() and "100 of 100" in text.getvalue()


def test_phases_end_with_their_block(clock, capsys) -> None:
    with pytest.raises(ZeroDivisionError), progress.phase(Console(), "a"):
        raise ZeroDivisionError
    for _ in progress.track([[1]] * 9, 9):
        clock[0] += 60
    assert capsys.readouterr().out == ""


def test_parts_show_their_share_and_the_time_left(clock, capsys) -> None:
    with progress.phase(Console(), "merge", parts=4):
        for name in ("loading", "merging", "saving", "comparing"):
            with progress.part(name):
                for _ in progress.track(range(10), 10, lambda _: 1):
                    clock[0] += 3
    assert capsys.readouterr().out.splitlines() == [
        "merge, loading: 12%, 3 min 30 s left",
        "merge, merging: 38%, 1 min 40 s left",
        "merge, saving: 62%, 54 s left",
        "merge, comparing: 88%, 17 s left",
    ]


def test_training_prints_a_line_of_a_step_every_30_seconds(clock, capsys) -> None:
    console = Console()
    console.start(total=1000, done=100)
    for step in range(101, 106):
        clock[0] += 20
        console.step(step, 1000, "loss 1.5")
    console.step(150, 1000, "loss 1.4")
    console.stop()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[0] for line in lines] == ["step 102/1000", "step 104/1000", "step 150/1000"]
    assert lines[0] == "step 102/1000  loss 1.5  4 h 59 min left"


def test_training_prints_a_line_during_a_step_that_takes_long(clock, capsys) -> None:
    console = Console()
    console.start(total=10)
    clock[0] += 20
    console.step(1, 10, "loss 1.5")
    assert capsys.readouterr().out == "step 1/10  loss 1.5  3 min 0 s left\n"
    clock[0] += 40
    deadline = time.perf_counter() + 10
    while not (said := capsys.readouterr().out) and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert said == "training: 10%, 9 min 0 s left\n"
    console.reach(2)
    clock[0] += 40
    deadline = time.perf_counter() + 10
    while not (said := capsys.readouterr().out) and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert said == "training: 20%, 6 min 40 s left\n"
    console.stop()


def test_the_bar_of_training_follows_steps_that_are_not_logged() -> None:
    console, text = Console(), io.StringIO()
    console.console = RichConsole(file=text, force_terminal=True, width=80)
    console.start(total=10)
    console.reach(3)
    console.stop()
    assert "3/10" in text.getvalue()


def test_a_quiet_run_does_not_move_the_phase_around_it(clock, capsys) -> None:
    with progress.phase(Console(), "compare", parts=4):
        quiet = Console(quiet=True)
        quiet.start(total=10)
        clock[0] += 40
        quiet.step(9, 10, "loss 1.5")
        quiet.stop()
        list(progress.track([[1]], 1))
    assert capsys.readouterr().out.splitlines()[0].startswith("compare: 12%")


def test_a_phase_without_loops_shows_its_time(clock, capsys) -> None:
    with progress.phase(Console(), "loading the model"):
        clock[0] += 45
        deadline = time.perf_counter() + 10
        while not (said := capsys.readouterr().out) and time.perf_counter() < deadline:
            time.sleep(0.01)
    assert said == "loading the model: 45 s\n"


def test_loops_and_phases_within_a_run_are_not_shown(clock, capsys) -> None:
    with progress.phase(Console(), "sweep", parts=10), progress.part("trial 0", lambda: 0.5):
        shown(Console(quiet=True), clock, 9, 60.0)
        for _ in progress.track([[1]] * 9, 9):
            clock[0] += 60
    assert capsys.readouterr().out == ""


def test_time_left_counts_only_the_parts_that_ran(clock) -> None:
    display = progress.Phase(Console(), "sweep", 10)
    display.done, display.skipped = 6, 5
    assert display.state(100.0) == progress.Shown("sweep", 0.6, "60%", "6 min 40 s left")
    display.begin_part("trial 6", lambda: 0.5)
    assert display.state(150.0) == progress.Shown("sweep, trial 6", 0.65, "65%", "5 min 50 s left")


def test_an_inner_phase_replaces_the_bar_of_the_outer_one(clock) -> None:
    console, text = Console(), io.StringIO()
    console.console = RichConsole(file=text, force_terminal=True, width=80)
    with progress.phase(console, "outer phase", parts=2), progress.part("a"):
        list(progress.track([[1]], 1))
        clock[0] += 5
        list(progress.track([[1]], 1))
        assert "outer phase, a" in text.getvalue()
        with progress.phase(None, "inner phase"):
            clock[0] += 5
            list(progress.track([[1]] * 3, 3))
        between = text.getvalue()
        assert "inner phase" in between and "3 of 3" in between
        list(progress.track([[1]] * 3, 3))
        assert "outer phase, a" in text.getvalue().removeprefix(between)


def test_bars_fit_into_80_columns(clock) -> None:
    console, text = Console(), io.StringIO()
    console.console = RichConsole(file=text, force_terminal=True, width=80)
    name = "fine-tuned model: loss and answers of 1,024 validation examples, and more words"
    with progress.phase(console, name):
        for _ in progress.track([[1] * 1000] * 50, 50_000):
            clock[0] += 700
    lines = [re.sub("\x1b[^a-zA-Z]*[a-zA-Z]", "", line) for line in re.split("[\r\n]", text.getvalue())]
    assert max(map(len, lines)) <= 80 and any("50,000 of 50,000" in line for line in lines)


def test_bars_of_transformers_count_in_the_phase(clock, capsys) -> None:
    quieten_libraries()
    with progress.phase(Console(), "loading the model"):
        for _ in transformers.utils.logging.tqdm({"a": 1, "b": 2}.items(), desc="Loading weights"):
            clock[0] += 40
    assert capsys.readouterr().out == "loading the model: 1 of 2, 40 s left\n"
