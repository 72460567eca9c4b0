"""Plan: a program as plain numbers, and every choice that shapes its step."""
