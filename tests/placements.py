"""Decisions of placement, made by hand."""

from proxy.core.placement.decision import Cost, Placement


def placement_of(
    engine: str, predicted_tokens: int, n_tokens: int, costs: tuple[Cost, ...], rule: str
) -> Placement:
    """A decision for `engine`, among candidates of these costs."""
    chosen = next(cost for cost in costs if cost.engine == engine)
    elsewhere = max((cost.cached_tokens for cost in costs if cost is not chosen), default=None)
    return Placement(chosen, predicted_tokens, n_tokens, lambda: costs, rule, elsewhere)
