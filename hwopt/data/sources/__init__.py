"""Files, folders and Hub datasets become rows: formats, columns, tables, conversations."""
