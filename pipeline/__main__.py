"""``python -m pipeline`` is ``slurm-ppo``. Imports next to nothing: signals are heard from the start."""

import gc
import os
import signal
import sys

INTERRUPTED = 130
_AGAIN_SECONDS = 0.05
_ALLOCATIONS = 50_000
"""After so many more objects than before Python looks for garbage: most commands make fewer that are garbage,
and their imports many that are none."""
COMPLETE = "complete"
"""Hidden command by which a shell asks what the Tab key offers; see :mod:`pipeline.cli.completion`."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
"""Ctrl-C, and how Slurm ends a job and warns of its time limit."""
_heard: list[int] = []
"""Those of these signals that came so far."""


def main() -> None:
    """Entry point. Whenever one of these signals comes, it ends the command with a line, and no traceback."""
    ours = [n for n in _ENDING if signal.getsignal(n) in (signal.SIG_DFL, signal.default_int_handler)]
    for number in ours:  # the others are ignored by who started us
        signal.signal(number, leave)
    sys.unraisablehook = interrupt_again
    try:
        carry_out()
    finally:
        _turn(interrupt, leave)  # all is said and done


def _turn(handler: object, into: "signal._HANDLER") -> None:
    for number in _ENDING:
        if signal.getsignal(number) is handler:
            signal.signal(number, into)


def carry_out() -> None:
    """Import the command line, and carry it out; at a press of Tab nothing but what answers that."""
    if sys.argv[1:2] == [COMPLETE]:
        from pipeline.cli.completion.answer import main as answer

        answer(sys.argv[2:])
        return
    gc.set_threshold(_ALLOCATIONS)
    from pipeline.cli.app import main as command_line

    try:
        _turn(leave, interrupt)
        command_line()
    except (Exception, KeyboardInterrupt) as error:
        # Libraries make other errors of it: what comes after Ctrl-C comes of it.
        if not _heard and not isinstance(error, KeyboardInterrupt):
            raise
        for number in _ENDING:  # some press it twice
            signal.signal(number, signal.SIG_IGN)
        print(_in_words(), file=sys.stderr)
        sys.exit(INTERRUPTED)


def _in_words() -> str:
    """Say what ended the command."""
    number = _heard[-1] if _heard else signal.SIGINT
    warning = ", as Slurm warns of a time limit" if number == signal.SIGUSR2 else ""
    return (
        "interrupted" if number == signal.SIGINT else f"interrupted by {signal.Signals(number).name}{warning}"
    )


def interrupt(number: int, frame: object) -> None:
    """A signal while a command runs: it puts its things in order, and ends."""
    _heard.append(number)
    raise KeyboardInterrupt


def leave(number: int, frame: object) -> None:
    """End at once, where nothing has begun, or all is done: imports that are interrupted may say anything."""
    _heard.append(number)
    os.write(2, f"{_in_words()}\n".encode())
    os._exit(INTERRUPTED)


def interrupt_again(ignored: "sys.UnraisableHookArgs") -> None:
    """Where Python drops an exception, as in the call-backs of imports, have the signal come once more."""
    from threading import Timer

    if issubclass(ignored.exc_type, KeyboardInterrupt):
        Timer(_AGAIN_SECONDS, os.kill, [os.getpid(), _heard[-1] if _heard else signal.SIGINT]).start()
    else:
        sys.__unraisablehook__(ignored)


if __name__ == "__main__":
    main()
