"""A recording becomes a task graph: threads and streams cut into tasks, who waits for whom (thesis 4.4.2)."""
