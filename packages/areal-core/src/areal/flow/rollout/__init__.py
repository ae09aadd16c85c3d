"""Episodes: an agent talks to the engines, a reward ends it, and every token is kept as it was made."""
