"""What compiling and calling can be refused for. Each message names the thing, its value and the remedy."""


class GraphError(ValueError):
    """Base of every refusal of this package: a tree, spec, function or shape that cannot become a graph."""


class UnplannedShapeError(GraphError):
    """No bucket holds this shape. `dims`: the sizes asked for; `nearest`: the legal buckets closest to them.

    The caller splits the work or refuses it; nothing is ever compiled for it in service.
    """

    def __init__(self, message: str, dims: dict[str, int], nearest: tuple[dict[str, int], ...]) -> None:
        super().__init__(message)
        self.dims = dims
        self.nearest = nearest
