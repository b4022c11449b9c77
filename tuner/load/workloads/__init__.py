"""One module for each kind of workload."""
