"""How often the threads of a process that serves take turns."""

import sys

_INTERVAL_S = 0.0005


def switch_threads_often() -> None:
    """Let a thread wait half a millisecond for Python's lock, where five are usual.

    The threads that move streams give the lock away with each read and write of a socket. One that
    computes, such as a view, then kept it for five milliseconds: with many streams and new requests
    at the same moment, a good part of the time to a first token was that wait.
    """
    sys.setswitchinterval(_INTERVAL_S)
