"""Exact diffusion and D²: corrections that sum to zero cancel the bias of plain averaging.

A worker whose gradient is not zero at the common optimum would be drawn away from it in each step, and its
neighbours with it. The correction is what neighbours have disagreed by until now; it comes to cancel the step
that a worker would make at the optimum. Since it sums to zero, the mean of all parameters moves by the steps
alone. Sums of many rounds keep what each of them is rounded by; so what is exchanged are differences, of
which two neighbours have the same but for the sign, and not the mix, whose rounding does not cancel.

`exact-diffusion`: Yuan, Ying, Zhao, Sayed 2019, "Exact diffusion for distributed optimization and learning,
part I", algorithm 1; with proximal steps it is NIDS (Li, Shi, Yan 2019). `d2`: decentralised training over
decentralised data (Tang, Lian, Yan, Zhang, Liu 2018, algorithm 1).
"""

from __future__ import annotations

from shoal.core.errors import UsageError
from shoal.strategies.neighbor import ExchangeStrategy
from shoal.strategies.options import D2Options, SymmetricOptions
from shoal.strategies.session import TrainingSession
from shoal.tensors import Flat
from shoal.topology import Topology, Weights
from shoal.topology.properties import lazier, require_symmetric, smallest_eigenvalue

_LIMIT = -1 / 3
_AIM = -1 / 4
"""The smallest eigenvalue, when it is chosen: near −1/3 a disagreement takes long to die out."""


class ExactDiffusion(ExchangeStrategy):
    """`φ_i = opt(x_i, g_i) + c_i`, then `x_i ← φ_i + d_i`, `c_i ← c_i + d_i`, from c_i = 0 on.

    `d_i = Σ_j W_ij (φ_j − φ_i)`, with (I + W)/2 for W, which suits every static symmetric topology. With
    plain SGD and one step a round that is `x ← W(2x − x' − lr·(g − g'))`, where a dash means the step before.
    With another optimizer `lr·g` is what its step does. Of `local_steps` J, each step gets 1/J of c. In a
    step that was skipped a worker mixes its parameters as they are.

    PeerLost when a peer is lost: without its correction the others' do not sum to zero, and would pull all of
    them into one direction for ever. So does, more gently, that of a worker that leaves in order, until the
    next global average (`global_average_every`).
    """

    name = "exact-diffusion"
    Options = SymmetricOptions
    options: SymmetricOptions
    correction: Flat
    _stepped: Flat

    def fit(self, topology: Topology) -> Topology:
        """Makes a symmetric mixing matrix as lazy as the method's proof needs it."""
        require_symmetric(topology, self.name)
        return lazier(topology, 0.5)

    def round_weights(self, session: TrainingSession) -> Weights:
        """Gives those of `Σ_j W_ij (x_j − x_i)`: what mixing would change."""
        return super().round_weights(session).differences()

    def start(self, session: TrainingSession) -> None:
        """Begins with corrections of zero."""
        super().start(session)
        self.correction = self._buffers.live.zeros_like()
        self._stepped = self._buffers.live.zeros_like()

    def after_step(self, session: TrainingSession) -> None:
        """Adds the correction to the step, then mixes with the neighbours."""
        if session.is_skipped or session.is_void:
            if session.is_round:
                self._combine(session)
            return
        self._buffers.adopt()
        live = self._buffers.live
        if session.is_round:
            self._stepped.copy_(live)
        live.add_(self.correction, alpha=1 / self.options.local_steps)
        if not session.is_round:
            return
        try:
            self._combine(session)
        except BaseException:
            for name, stepped in self._stepped.items():  # elsewhere: others may still read what was sent
                session.named_parameters[name].data = stepped.clone()
            raise

    def _combine(self, session: TrainingSession) -> None:
        session.wait_for(self._start_round(session))
        self.correction += self._buffers.spare
        self._buffers.spare.add_(self._buffers.live)
        self._buffers.swap()

    def average_all(self, session: TrainingSession) -> None:
        """Makes corrections sum to zero, too, whatever rounding and losses have made of them."""
        session.average_parameters()
        self.correction -= session.average(self.correction, session.others)


class D2(ExactDiffusion):
    """`x ← W(2x − x' − lr·(g − g'))`; the smallest eigenvalue of W is above −1/3.

    With (I + W)/2 for W it is exact diffusion; W itself mixes faster where it fits.
    """

    name = "d2"
    Options = D2Options
    options: D2Options

    def fit(self, topology: Topology) -> Topology:
        """Lifts the eigenvalues as far as needed, or as the option says."""
        require_symmetric(topology, self.name)
        smallest = smallest_eigenvalue(topology)
        laziness = self.options.laziness
        least = max(0.0, (_AIM - smallest) / (1 - smallest)) if smallest < _AIM else 0.0
        if laziness is None:
            return lazier(topology, least)
        if laziness + (1 - laziness) * smallest <= _LIMIT + 1e-9:
            raise UsageError(
                f"d2 needs eigenvalues above −1/3; the smallest of '{topology.name}' with laziness "
                f"{laziness:g} is {laziness + (1 - laziness) * smallest:.3f}.",
                next_step=f"take laziness={least:.2g} or leave it out; full, star and odd rings need none.",
            )
        return lazier(topology, laziness)
