"""Who plays the trained roles, group by group: their adapters, or past versions of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentscope_tuner.config import OpponentPoolConfig, RolesConfig
from agentscope_tuner.errors import RoleError
from agentscope_tuner.types import Cast, version_of


def plain_cast(config: RolesConfig, roles: Sequence[str]) -> Cast:
    """Everybody plays as they are.

    Raises:
        RoleError: `roles.initial` names a role that is not trained, or every one of them.
    """
    unknown = sorted(set(config.initial) - set(roles))
    if unknown:
        raise RoleError(f"`roles.initial` names `{unknown[0]}`, which is not trained; trained: {', '.join(roles)}")
    if roles and set(config.initial) == set(roles):
        raise RoleError("`roles.initial` names every trained role, so nobody is left; leave out the one to look at")
    initial = dict.fromkeys(config.initial, "")
    return Cast({role: role for role in roles} | initial, initial)


class OpponentPool:
    """Past versions of the roles' adapters, and who meets them."""

    def __init__(self, config: OpponentPoolConfig, cast: Cast, seed: int) -> None:
        """`cast` is who plays where nobody meets the past.

        Raises:
            RoleError: a team names a role that does not learn, or a role is missing in all of them.
        """
        self._config = config
        self._cast = cast
        self._seed = seed
        learning = [role for role in cast.adapters if role not in cast.opponents]
        self._teams = config.teams or [[role] for role in learning]
        named = [role for team in self._teams for role in team]
        if sorted(named) != sorted(learning):
            raise RoleError(
                f"`roles.opponent_pool.teams` must name every role that learns once ({', '.join(learning)}), got "
                f"{', '.join(named)}"
            )
        self.steps: list[int] = []
        """The steps after which versions were kept."""

    def due(self, step: int) -> bool:
        """Whether to keep a version after this step."""
        return step % self._config.interval_steps == 0

    def keep(self, step: int) -> int | None:
        """Add a version; returns the one to drop where there are too many."""
        self.steps.append(step)
        if len(self.steps) <= self._config.size:
            return None
        # The one whose neighbours are closest is missed least: what stays is spread evenly, first and last included.
        gaps = [after - before for before, after in zip(self.steps, self.steps[2:], strict=False)]
        return self.steps.pop(1 + gaps.index(min(gaps)) if gaps else 0)

    def cast_of(self, group: str) -> Cast:
        """Who plays in a group; the same whenever it is asked."""
        rng = random.Random(f"{self._seed}/{group}")
        if not self.steps or rng.random() >= self._config.probability:
            return self._cast
        team, step = rng.choice(self._teams), rng.choice(self.steps)
        past = {role: version_of(role, step) for other in self._teams if other is not team for role in other}
        return Cast({**self._cast.adapters, **past}, {**self._cast.opponents, **past})
