"""Reading a configuration's fields, each checked for its type, and refusing what is not supported."""

from collections.abc import Collection, Mapping
from typing import Any

from refusion_jax.config import nearest
from refusion_jax.huggingface.errors import CheckpointError, shown


class Fields:
    """The fields of a JSON object; one that is null counts as absent.

    Args:
      values: the object.
      where: how messages begin.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where

    def integer(self, name: str, *default: int | None) -> Any:
        """A whole number that fits an int32, as all sizes, positions and token IDs do.

        Raises:
          CheckpointError: when it is something else, or absent without a default.
        """
        value = self._get(name, default)
        if value is not None and (type(value) is not int or abs(value) >= 2**31):
            raise self.error(name, "it must be a whole number below 2**31")
        return value

    def number(self, name: str, *default: float | None) -> Any:
        """A number, as float.

        Raises:
          CheckpointError: when it is something else, or absent without a default.
        """
        value = self._get(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
            raise self.error(name, "it must be a number")
        return float(value)

    def flag(self, name: str, *default: bool | None) -> Any:
        """True or false.

        Raises:
          CheckpointError: when it is something else, or absent without a default.
        """
        value = self._get(name, default)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, "it must be true or false")
        return value

    def text(self, name: str, *default: str | None) -> Any:
        """A text.

        Raises:
          CheckpointError: when it is something else, or absent without a default.
        """
        value = self._get(name, default)
        if value is not None and not isinstance(value, str):
            raise self.error(name, "it must be a text")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """A whole number or a list of them; none where it is absent.

        Raises:
          CheckpointError: when it is something else.
        """
        value = self.values.get(name)
        items = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(item) is int and abs(item) < 2**31 for item in items):
            raise self.error(name, "it must be a whole number below 2**31, or a list of them")
        return tuple(items)

    def section(self, name: str) -> "Fields | None":
        """The fields of an object within; None where it is absent or empty.

        Raises:
          CheckpointError: when it is something else.
        """
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, "it must be an object")
        return Fields(value, f"{self.where} in {name}") if value else None

    def refuse_unless(self, name: str, supported: Collection[Any]) -> None:
        """Refuses a value that changes what is computed.

        Raises:
          CheckpointError: when it is present and none of `supported`, of which the first is what a remedy names.
        """
        value = self.values.get(name)
        if value is not None and not any(value == each and type(value) is type(each) for each in supported):
            remedy = f"only {next(iter(supported))!r} is" if supported else "leave it out"
            raise self.error(name, f"which is not supported; {remedy}", "sets")

    def error(self, name: str, problem: str, verb: str = "has") -> CheckpointError:
        """What to raise for a field."""
        value = shown(repr(self.values.get(name)))
        joint = f"sets {name} to {value}, {problem}" if verb == "sets" else f"has {name} {value}; {problem}"
        return CheckpointError(f"{self.where} {joint}.")

    def _get(self, name: str, default: tuple[Any, ...]) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if not default and name in self.values:
            raise CheckpointError(f"{self.where} has null for {name!r}, which the model needs; give its value.")
        if not default:
            raise CheckpointError(f"{self.where} has no field {name!r}.{nearest(name, self.values)}")
        return default[0]
