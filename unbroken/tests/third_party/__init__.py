"""Tasks that are written with other packages: a file for each package, with its data.

:mod:`tests.test_third_party` trains, kills and resumes them. Nothing is downloaded: each data
module makes its files itself.
"""
