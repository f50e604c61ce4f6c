"""The page of `aof2 report`: one file, readable without a network.

charts.py    numbers → figures, as plotly.js takes them
page.py      figures, tables and words → the page
page.css     how it looks

Charts are plotly.js's: MIT, kept well, and its Python package ships the script whole, so the page holds it (4.8 MB).
Figures are written as its JSON by hand: nothing else of the package is used.
"""
