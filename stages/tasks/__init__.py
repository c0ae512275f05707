"""The six stages: one module and one function ``run(task, context)`` each."""
