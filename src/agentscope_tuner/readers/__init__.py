"""Where tasks come from."""

from agentscope_tuner.readers.tasks import TaskStream, load_tasks, planned_steps, task_to_row

__all__ = ["TaskStream", "load_tasks", "planned_steps", "task_to_row"]
