"""Analysis -> console, HTML, PNG, Markdown. Reports draw; they never derive."""
