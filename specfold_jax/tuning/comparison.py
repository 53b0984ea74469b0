"""The settings measured so far, and which of them is best."""

from dataclasses import dataclass, field

from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.methods import MethodName
from specfold_jax.tuning.measure import Outcome, Setting, Subject


@dataclass
class Comparison:
    """Settings of one subject, all measured on the same prompts.

    `seed`: of the intervals. `target`: the least agreement that qualifies. `lossless`: only settings that are exact by construction
    qualify. `graphs`: each setting's graph. `finalists`: once there are some, only they are compared.
    """

    subject: Subject
    seed: int
    target: float
    lossless: bool
    outcomes: dict[Setting, Outcome] = field(default_factory=dict)
    graphs: dict[Setting, DraftGraph | None] = field(default_factory=dict)
    finalists: list[Setting] | None = None

    def add(self, outcome: Outcome, graph: DraftGraph | None) -> None:
        """Takes a measured setting."""
        self.outcomes[outcome.setting], self.graphs[outcome.setting] = outcome, graph

    def of(self, method: MethodName) -> list[Outcome]:
        """The outcomes of a method."""
        return [outcome for outcome in self.outcomes.values() if outcome.setting.method == method]

    def interval(self, outcome: Outcome) -> tuple[float, float]:
        """Its 95 % interval, tokens a second."""
        return outcome.rate_interval(self.subject.batch, self.seed)

    def low(self, outcome: Outcome) -> float:
        """The lower end of its interval, by which settings are ranked."""
        return self.interval(outcome)[0]

    def qualifies(self, outcome: Outcome) -> bool:
        """Whether it follows vanilla as closely as asked, as far as the sample can tell."""
        return outcome.agreement >= self.target and (outcome.setting.lossless or not self.lossless)

    def best(self, method: MethodName | None = None) -> Outcome | None:
        """The best qualifying outcome, of a method or of all."""
        rivals = self.outcomes if self.finalists is None else self.finalists
        fit = [self.outcomes[s] for s in rivals if method in (None, s.method) and self.qualifies(self.outcomes[s])]
        return max(fit, key=self.low, default=None)

    def leading(self, method: MethodName) -> Outcome:
        """The best qualifying outcome of a method, or its fastest if none qualifies."""
        return self.best(method) or max(self.of(method), key=self.low)
