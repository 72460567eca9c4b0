"""The public interface: compile, the program, and the session behind it."""
