"""Tables, plots and sentences for the terminal, and the live view of a running study."""
