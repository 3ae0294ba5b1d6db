"""Gyre: elastic online RL for LLM agents on very long tasks."""
