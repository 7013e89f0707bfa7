"""What answers to balises 3, 4 share."""

NEIGHBOURS = (
    ("place.stage + 1", "place.stage - 1"),
    ("dist.get_rank() + 1", "dist.get_rank() - 1"),
    ("(dist.get_rank() + 1) % place.n_stages", "(dist.get_rank() - 1) % place.n_stages"),
)
