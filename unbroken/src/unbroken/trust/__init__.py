"""What a checkpoint of somebody else may do: give numbers.

* :mod:`~unbroken.trust.keys` tells whose a file is. One's own is trusted like what is typed.
* :mod:`~unbroken.trust.archive` and :mod:`~unbroken.trust.torch_file` read every file, whosever it
  is, without running anything.
* :mod:`~unbroken.trust.strangers` takes from a stranger's configuration what may be used.
* :mod:`~unbroken.trust.imports` stands before each import that it asks for.
* :mod:`~unbroken.trust.sizes` bounds what is made from it by the weights in the file.
* :mod:`~unbroken.trust.places` tells which texts are places in the file system.
"""
