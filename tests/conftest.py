"""What all tests take for granted."""

import signal


def pytest_configure():
    # A shell starts background jobs with Ctrl-C ignored, and children inherit that: tests of
    # interruptions need the ordinary answer to it wherever they run.
    signal.signal(signal.SIGINT, signal.default_int_handler)
