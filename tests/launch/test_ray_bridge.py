from shoal.launch.ray_bridge import ActorPlace, variables_of


def test_workers_of_a_node_see_all_its_gpus_in_the_order_of_their_local_ranks():
    places = [
        ActorPlace("a", "10.0.0.1", "one", ("3",)),
        ActorPlace("a", "10.0.0.1", "one", ("1",)),
        ActorPlace("b", "10.0.0.2", "two", ("0",)),
    ]
    seen = [variables_of(place, places)["CUDA_VISIBLE_DEVICES"] for place in places]
    assert seen == ["3,1", "3,1", "0"]


def test_without_gpus_nothing_is_said_of_them():
    place = ActorPlace("a", "10.0.0.1", "one")
    assert variables_of(place, [place]) == {}
