"""Text for the tasks: corpora of books (``corpus.py``), tokenizers (``tokenizers.py``), contexts of any length
(``haystack.py``), texts in one row (``stream.py``), and synthetic prose where there are no books (``noise.py``)."""
