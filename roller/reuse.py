"""The data-reuse score (thesis 6.3.1)."""

from __future__ import annotations


def data_reuse_score(traffic: float, grown_traffic: float, footprint: float, grown_footprint: float) -> float:
    """Traffic saved per unit of footprint added when one axis grows a step.

    S_i = (Q(T) - Q(T'_i)) / (F(T'_i) - F(T))    [thesis 6.3.1]
    Q is MemTraffic in bytes, F is MemFootprint. A step that adds no footprint scores the traffic it saves.
    """
    return (traffic - grown_traffic) / max(1, grown_footprint - footprint)
