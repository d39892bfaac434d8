"""What did the papers measure, and what comes out here? Experiments, each a function; `registry` names them all."""
