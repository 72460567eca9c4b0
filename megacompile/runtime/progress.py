"""Progress: how far the updates of each step are, so that a fault tells whether the state is inconsistent."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class StepProgress:
    """Updates of one step: those that it will make, those begun, those done."""

    planned: int
    begun: int = 0
    done: int = 0


@dataclass
class Progress:
    """Updates of all steps that are not over, and what storage lost."""

    steps: dict[int, StepProgress] = field(default_factory=dict)
    unwritten: set[int] = field(default_factory=set)  # groups whose update waits in the window for its write
    lost: bool = False  # whether storage failed

    @property
    def inconsistent(self) -> bool:
        """Whether, with nothing under way, some step updated a part of the weights only, or lost some."""
        return self.lost or any(s.begun > 0 and s.done < s.planned for s in self.steps.values())

    def begin(self, step: int, planned: int) -> None:
        """Note a step that will make so many updates, and forget those that are over."""
        self.steps = {k: s for k, s in self.steps.items() if s.done < s.planned}
        self.steps[step] = StepProgress(planned)

    def clear(self) -> None:
        """The state was set anew: what earlier steps left undone no longer matters."""
        self.steps.clear()
        self.unwritten.clear()
        self.lost = False
