"""Norms with the activation, the add or the pooling beside them as one kernel; over `modules`."""
