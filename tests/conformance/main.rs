//! Does each link, store and kernel back end keep one contract?
//!
//! Owns: the list of contracts; each module runs one list of checks over every implementation of one trait.

mod store;
