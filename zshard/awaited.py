"""What other ranks wait for: an exception that leaves it has this rank give up, not them wait."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from .errors import Error

if TYPE_CHECKING:
    from .comm import Comm

Method = TypeVar("Method", bound=Callable[..., object])


class Awaited(NamedTuple):
    """A context; see ``Comm.awaited``."""

    comm: Comm
    what: str
    unit: str
    but: tuple[type[Exception], ...]

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if kind is not None and not issubclass(kind, self.but):
            of = f" of unit {self.unit!r}" if self.unit else ""
            self.comm.give_up(kind, self.what + of)


def awaited(what: str) -> Callable[[Method], Method]:
    """A decorator for methods of objects with a ``_comm``; see ``Comm.awaited``."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def attended(self: Any, *args: object, **kwargs: object) -> object:
            try:  # costs a step less time than a context
                return method(self, *args, **kwargs)
            except Error:  # which the other ranks raise as well, or are told of
                raise
            except BaseException as error:
                self._comm.give_up(type(error), what)
                raise

        return cast(Method, attended)

    return decorate
