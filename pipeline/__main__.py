"""``python -m pipeline`` is ``slurm-ppo``. Imports next to nothing: Ctrl-C is to be heard from the start."""

import os
import signal
import sys

INTERRUPTED = 130
_AGAIN_SECONDS = 0.05
COMPLETE = "complete"
"""Hidden command by which a shell asks what the Tab key offers; see :mod:`pipeline.cli.completion`."""
_heard: list[int] = []
"""Signals of Ctrl-C so far."""


def main() -> None:
    """Entry point. Whenever Ctrl-C comes, it ends the command with one line and no traceback."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # who started us ignores it
        carry_out()
        return
    signal.signal(signal.SIGINT, leave)
    sys.unraisablehook = interrupt_again
    try:
        carry_out()
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, leave)  # all is said and done


def carry_out() -> None:
    """Import the command line, and carry it out; at a press of Tab nothing but what answers that."""
    if sys.argv[1:2] == [COMPLETE]:
        from pipeline.cli.completion.answer import main as answer

        answer(sys.argv[2:])
        return
    from pipeline.cli.app import main as command_line

    try:
        if signal.getsignal(signal.SIGINT) is leave:
            signal.signal(signal.SIGINT, interrupt)
        command_line()
    except (Exception, KeyboardInterrupt) as error:
        # Libraries make other errors of it: what comes after Ctrl-C comes of it.
        if not _heard and not isinstance(error, KeyboardInterrupt):
            raise
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # some press it twice
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def interrupt(number: int, frame: object) -> None:
    """Ctrl-C while a command is at work: it puts its things in order, and ends."""
    _heard.append(number)
    raise KeyboardInterrupt


def leave(number: int, frame: object) -> None:
    """End at once, where nothing has begun, or all is done: imports that are interrupted may say anything."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def interrupt_again(ignored: "sys.UnraisableHookArgs") -> None:
    """Where Python drops an exception, as in the call-backs of imports, have Ctrl-C come once more."""
    from threading import Timer

    if issubclass(ignored.exc_type, KeyboardInterrupt):
        Timer(_AGAIN_SECONDS, os.kill, [os.getpid(), signal.SIGINT]).start()
    else:
        sys.__unraisablehook__(ignored)


if __name__ == "__main__":
    main()
