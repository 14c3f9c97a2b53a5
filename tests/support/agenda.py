"""What is to happen in a scenario, by a clock that stands still in between."""

import heapq
import itertools
from collections.abc import Awaitable, Callable

Action = Callable[[], Awaitable[object]]


class Agenda:
    """The clock, and what waits for it."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self._order = itertools.count()
        self._entries: list[tuple[float, int, Action]] = []
        self._known: set[tuple[str, ...]] = set()  # what has waited for the clock, or does
        self._waiting: set[tuple[str, ...]] = set()  # what does
        self._by_itself: set[Action] = set()  # what goes on for as long as anything else happens

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def next(self) -> float:
        """When something happens next."""
        return self._entries[0][0]

    def due(self) -> list[Action]:
        """Take off what is due."""
        actions = []
        while self._entries and self.next <= self.now:
            actions.append(heapq.heappop(self._entries)[2])
        return [action for action in actions if action is not _look_only]

    def at(self, when: float, action: Action) -> None:
        heapq.heappush(self._entries, (when, next(self._order), action))

    def look_at(self, when: float) -> None:
        """Have the clock stop, though nothing is to happen."""
        self.at(when, _look_only)

    def once(self, seconds: float, action: Action, *what: str) -> None:
        """Have the clock do this in so many seconds, unless it is written down already or done."""
        if what in self._known:
            return
        self._known.add(what)
        self._waiting.add(what)

        async def act() -> None:
            self._waiting.discard(what)
            await action()

        self.at(self.now + seconds, act)

    def waits(self, *what: str) -> bool:
        """Tell whether that waits for the clock."""
        return what in self._waiting

    def meanwhile(self, at: float, action: Action, *what: str) -> None:
        """Have the clock do this then, once, if anything else is still to happen then or later."""
        if what in self._known or not any(
            when >= at and each not in self._by_itself for when, _, each in self._entries
        ):
            return
        self._known.add(what)

        async def act() -> None:
            self._by_itself.discard(act)
            await action()

        self._by_itself.add(act)
        self.at(at, act)


async def _look_only() -> None:
    pass
