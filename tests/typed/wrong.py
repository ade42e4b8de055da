"""Mistakes that type checkers find: mypy would report a comment that ignores none."""

import headrace as hr

hr.DataLoader(3)  # type: ignore
hr.DataLoader([1], placement="moon")  # type: ignore
hr.DataLoader([1], concurency=3)  # type: ignore
hr.DataLoader([1], seed="1")  # type: ignore
hr.DataLoader([1], on_error=lambda failure: None)  # type: ignore
hr.DataLoader([1], on_error=hr.SkipErrors(max_share="1 %"))  # type: ignore
