"""Moved to ``project/digits.py``."""  # moved: delete this file after the merge

from project.digits import find_digit as find_digit
from project.digits import is_unclear as is_unclear
