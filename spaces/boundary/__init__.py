"""What crosses to the world outside: values that training code hands in, files and their names, storage URLs, and secrets."""
