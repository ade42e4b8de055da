"""Mistakes that type checkers find; each line with an error says so."""

import headrace as hr

hr.DataLoader(3)  # error
hr.DataLoader([1], placement="moon")  # error
hr.DataLoader([1], concurency=3)  # error
hr.DataLoader([1], seed="1")  # error
hr.DataLoader([1], on_error=lambda failure: None)  # error
hr.DataLoader([1], on_error=hr.SkipErrors(max_share="1 %"))  # error
