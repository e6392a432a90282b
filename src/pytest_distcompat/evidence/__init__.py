"""Evidence from the runs in a session's store, as plain data for the reports."""
