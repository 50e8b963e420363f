from project.engine.exact_loading import ExactLoader as ExactLoader
from project.engine.exact_loading import ExactLoading as ExactLoading
from project.engine.exact_loading import Start as Start
