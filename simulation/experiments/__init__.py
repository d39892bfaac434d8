"""What did the papers measure, and what comes out here? One experiment, one function; `registry` names them all."""
