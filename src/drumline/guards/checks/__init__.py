"""The checks, each written once with its threshold beside it. They decide from the values that a loop gives them."""
