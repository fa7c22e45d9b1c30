"""What does a machine lend to the work on it? The options of an agent for that, and the same words passed on by `remit up`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.agent.building import Lends

CACHE: Final = "10Gi"


class Lending(NamedTuple):
    """As it was said."""

    artifact_dirs: tuple[Path, ...]
    artifact_allow: tuple[str, ...]
    host_paths: tuple[Path, ...]
    artifact_cache: str
    hidden: tuple[Path, ...] = ()
    user: str = ""

    def words(self) -> tuple[str, ...]:
        """For `remit agent`."""
        said = [("--artifact-dir", str(one)) for one in self.artifact_dirs]
        said += [("--artifact-allow", one) for one in self.artifact_allow]
        said += [("--host-path", str(one)) for one in self.host_paths]
        said += [("--hide", str(one)) for one in self.hidden]
        said += [("--work-user", self.user)] if self.user else []
        return tuple(word for pair in (*said, ("--artifact-cache", self.artifact_cache)) for word in pair)

    def lends(self) -> Lends:
        from remit.agent.building import Lends
        from remit.model.quantity import parse_quantity
        from remit.world.promises import NotStarted
        from remit.world.users import work_user

        try:
            user = work_user(self.user)
        except NotStarted as error:
            raise click.BadParameter(escaped(str(error)), param_hint="--work-user") from error
        cache = parse_quantity("memory", self.artifact_cache)
        return Lends(self.artifact_dirs, self.artifact_allow, self.host_paths, cache, self.hidden, user)


def lending_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds them to a command, which gets them together as `lending`."""
    place = click.Path(path_type=Path, file_okay=False, exists=True, resolve_path=True)

    made = click.Path(path_type=Path, file_okay=False, resolve_path=True)

    @click.option(
        "--artifact-dir",
        "artifact_dirs",
        type=made,
        multiple=True,
        help="Below it `file:` artifacts may be read. Made if it is not there.",
    )
    @click.option(
        "--artifact-allow",
        multiple=True,
        metavar="HOST|CIDR",
        help="Artifacts may be fetched from there, though it is not public; a policy has to permit it too.",
    )
    @click.option(
        "--host-path",
        "host_paths",
        type=place,
        multiple=True,
        help="Work may mount what is below it, where a policy permits it.",
    )
    @click.option("--artifact-cache", default=CACHE, show_default=True, metavar="SIZE", help="How much is kept of artifacts.")
    @click.option("--hide", "hidden", type=place, multiple=True, help="Sandboxed work sees nothing of what is below it.")
    @click.option(
        "--work-user",
        "work_user",
        default="",
        metavar="USER",
        help="As whom work runs that names no user.  [default: a user of each tenant, if the agent is root]",
    )
    @functools.wraps(command)
    def taking(
        *, artifact_dirs: tuple[Path, ...], artifact_allow: tuple[str, ...], host_paths: tuple[Path, ...], artifact_cache: str,
        hidden: tuple[Path, ...], work_user: str, **others: Any,
    ) -> None:  # fmt: skip
        _check(artifact_allow, artifact_cache)
        _make(artifact_dirs)
        command(lending=Lending(artifact_dirs, artifact_allow, host_paths, artifact_cache, hidden, work_user), **others)

    return taking


def _make(places: tuple[Path, ...]) -> None:
    """It is empty then, and that is said: it may have been meant to be another."""
    for place in places:
        if place.is_dir():
            continue
        try:
            place.mkdir(0o755, parents=True)
        except OSError as error:
            wrong = f"{escaped(str(place))} is not there, and could not be made ({error.strerror}); make it, or name another"
            raise click.BadParameter(wrong, param_hint="--artifact-dir") from error
        click.echo(f"remit: made {escaped(str(place))}, for artifacts", err=True)


def _check(allow: tuple[str, ...], cache: str) -> None:
    from remit.model.quantity import parse_quantity
    from remit.model.sources import is_host_or_network

    for one in allow:
        if not is_host_or_network(one):
            wrong = f"{escaped(one)} is neither a host nor a network; write a name in lower case, or 10.0.0.0/8"
            raise click.BadParameter(wrong, param_hint="--artifact-allow")
    try:
        parse_quantity("memory", cache)
    except ValueError as error:
        raise click.BadParameter(escaped(str(error)), param_hint="--artifact-cache") from error
