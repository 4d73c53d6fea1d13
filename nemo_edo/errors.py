class UserError(ValueError):
    """An error of the user's input, shown without a traceback; everything else is a bug and keeps its traceback."""
