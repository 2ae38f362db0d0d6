"""The routes by which norm calls run. `functional` and `modules` use them."""
