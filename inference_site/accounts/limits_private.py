"""The one private method of limits that the project calls.

``RedisStorage`` has public methods to read the count of the previous window, and none to change it.
"""

from limits.storage import RedisStorage


def change_previous_count(storage: RedisStorage, key: str, window_s: int, change: int) -> None:
    """Change the count of the window before the current one, which must not have expired."""
    storage.incr(storage._previous_window_key(key), window_s, change)
