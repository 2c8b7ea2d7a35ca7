"""The report of runs: their folders read to rows, and the rows written as a table, csv, json and one page of html."""
