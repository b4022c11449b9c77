"""What people see: the table in the terminal, the live view of a sweep, and the HTML report."""
