"""The search: Optuna's ask and tell around trials, finals, and the choice of the winner."""
