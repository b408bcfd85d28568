"""Times of operators and of given schedules, backward passes included."""
