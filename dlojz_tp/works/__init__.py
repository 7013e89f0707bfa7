"""The sources of the practical works, their balises, and where a trainee's state is kept."""
