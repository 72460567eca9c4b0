"""Assemble: a program as plain numbers, and the plan: every decision that shapes its step."""
